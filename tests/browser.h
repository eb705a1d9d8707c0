// A headless Chromium that opens pages from disk, driven through pipes with the DevTools protocol. Collects errors of
// scripts and requests for anything else than the page.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>

#include "tests/commands.h"

namespace streambp {

class Browser {
 public:
  // Empty: there is none.
  static std::string program() {
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
      if (const std::string found = shell(std::string("command -v ") + name).output; !found.empty())
        return found.substr(0, found.find('\n'));
    return "";
  }

  explicit Browser(const fs::path& profile) : profile_(profile) {
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) throw std::runtime_error("no pipes");
    signal(SIGPIPE, SIG_IGN);
    const std::string program = Browser::program(), directory = "--user-data-dir=" + profile.string();
    child_ = fork();
    if (child_ == 0) {
      const int in = fcntl(to[0], F_DUPFD, 10), out = fcntl(from[1], F_DUPFD, 10), none = open("/dev/null", O_RDWR);
      dup2(in, 3), dup2(out, 4), dup2(none, 1), dup2(none, 2);
      execl(program.c_str(), program.c_str(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--remote-debugging-pipe", directory.c_str(),
            "about:blank", nullptr);
      _exit(127);
    }
    close(to[0]), close(from[1]);
    to_ = to[1], from_ = from[0];
    const std::string target = call("Target.createTarget", {{"url", "about:blank"}})["targetId"];
    session_ = call("Target.attachToTarget", {{"targetId", target}, {"flatten", true}})["sessionId"];
    for (const char* domain : {"Page.enable", "Runtime.enable", "Log.enable", "Network.enable"}) call(domain);
  }
  ~Browser() {
    close(to_), close(from_);  // Chromium ends when its pipe does
    kill(child_, SIGTERM);
    waitpid(child_, nullptr, 0);
    std::error_code ignored;  // its processes may still write there
    for (int i = 0; i < 50 && fs::remove_all(profile_, ignored) == static_cast<std::uintmax_t>(-1); ++i)
      usleep(100'000);
  }
  Browser(const Browser&) = delete;

  struct Look {
    int width = 1200;
    bool dark = false;
  };
  // Returns when the page's scripts have run and two frames are drawn.
  void open_page(const fs::path& page, const Look& look, const std::string& fragment = "") {
    call("Emulation.setDeviceMetricsOverride",
         {{"width", look.width}, {"height", 900}, {"deviceScaleFactor", 1}, {"mobile", false}});
    const Json scheme = {{"name", "prefers-color-scheme"}, {"value", look.dark ? "dark" : "light"}};
    call("Emulation.setEmulatedMedia", {{"features", {scheme}}});
    errors.clear(), loaded_ = false;
    url_ = "file://" + fs::absolute(page).string();
    for (const std::string& url : {std::string("about:blank"), url_ + fragment}) {  // not just another fragment
      loaded_ = false;
      call("Page.navigate", {{"url", url}});
      while (!loaded_) handle(receive());
    }
    evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))");
  }

  // The value of an expression of JavaScript in the page.
  Json evaluate(const std::string& expression) {
    const Json answer =
        call("Runtime.evaluate", {{"expression", expression}, {"returnByValue", true}, {"awaitPromise", true}});
    if (answer.contains("exceptionDetails"))
      throw std::runtime_error(expression + ": " + answer["exceptionDetails"]["exception"].value("description", ""));
    return answer["result"].value("value", Json());
  }
  void press(const std::string& key) {
    for (const char* type : {"keyDown", "keyUp"})
      call("Input.dispatchKeyEvent", {{"type", type}, {"key", key}, {"code", key}});
  }
  void click(const std::string& selector) {
    const Json box = evaluate("(() => { const e = document.querySelector(" + Json(selector).dump() +
                              "); e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
                              "return [r.x + r.width / 2, r.y + r.height / 2]; })()");
    for (const char* type : {"mousePressed", "mouseReleased"})
      call("Input.dispatchMouseEvent",
           {{"type", type}, {"x", box[0]}, {"y", box[1]}, {"button", "left"}, {"clickCount", 1}});
  }
  // A PNG of the whole page, in the directory that the environment names, for people to look at.
  void screenshot(const std::string& name) {
    const char* directory = std::getenv("STREAMBP_SCREENSHOTS");
    if (!directory) return;
    const Json shot = call("Page.captureScreenshot", {{"captureBeyondViewport", true}});
    FILE* file = popen(("base64 -d > '" + std::string(directory) + "/" + name + ".png'").c_str(), "w");
    std::fputs(shot["data"].get<std::string>().c_str(), file);
    pclose(file);
  }

  std::vector<std::string> errors;

 private:
  Json call(const std::string& method, const Json& parameters = Json::object()) {
    Json message = {{"id", ++number_}, {"method", method}, {"params", parameters}};
    if (!session_.empty()) message["sessionId"] = session_;
    const std::string text = message.dump() + '\0';
    for (std::size_t sent = 0; sent < text.size();) {
      const ssize_t n = ::write(to_, text.data() + sent, text.size() - sent);
      if (n <= 0) throw std::runtime_error("the browser has ended");
      sent += static_cast<std::size_t>(n);
    }
    for (;;) {
      const Json answer = receive();
      if (answer.value("id", 0) != number_) {
        handle(answer);
      } else if (answer.contains("error")) {
        throw std::runtime_error(method + ": " + answer["error"].dump());
      } else {
        return answer["result"];
      }
    }
  }
  Json receive() {
    for (;;) {
      if (const std::size_t end = received_.find('\0'); end != std::string::npos) {
        const Json message = Json::parse(received_.substr(0, end));
        received_.erase(0, end + 1);
        return message;
      }
      pollfd readable = {from_, POLLIN, 0};
      char buffer[1 << 16];
      const ssize_t n = poll(&readable, 1, 120'000) == 1 ? ::read(from_, buffer, sizeof buffer) : 0;
      if (n <= 0) throw std::runtime_error("the browser does not answer");
      received_.append(buffer, static_cast<std::size_t>(n));
    }
  }
  void handle(const Json& event) {
    const std::string method = event.value("method", "");
    if (method == "Page.loadEventFired") loaded_ = true;
    if (method == "Runtime.exceptionThrown") errors.push_back(event["params"]["exceptionDetails"].dump());
    if (method == "Log.entryAdded") errors.push_back(event["params"]["entry"]["text"]);
    if (method == "Runtime.consoleAPICalled") errors.push_back("console: " + event["params"]["args"].dump());
    if (method == "Network.requestWillBeSent") {
      const std::string url = event["params"]["request"]["url"];
      if (!url.starts_with("file://") && !url.starts_with("data:") && url != "about:blank")
        errors.push_back("asks for " + url);
    }
  }

  const fs::path profile_;
  pid_t child_ = -1;
  int to_ = -1, from_ = -1, number_ = 0;
  bool loaded_ = false;
  std::string session_, url_, received_;
};

}  // namespace streambp
